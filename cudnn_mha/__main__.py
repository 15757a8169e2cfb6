"""``python -m cudnn_mha``."""

from __future__ import annotations

from cudnn_mha.cli import main

if __name__ == "__main__":
    main()
