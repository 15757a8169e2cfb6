"""What `import torch` calls, through the entry point ``torch.backends``.

It costs nothing while the variables are unset, and an exception here would break `import torch`.
"""

import contextlib
import os


def autoload() -> None:
    """Enables the package in every script if ``TORCH_CUDNN_MHA_ENABLED`` says so."""
    if os.environ.get("TORCH_CUDNN_MHA_RECORD"):
        # A script that never loads the package makes no call that could be recorded.
        with contextlib.suppress(Exception):
            from cudnn_mha import recording  # noqa: F401 (it says at exit that there was none)
    if not os.environ.get("TORCH_CUDNN_MHA_ENABLED"):
        return
    try:
        from cudnn_mha import backend, config

        backend.enable_from_environment()
        if config.settings().enabled:
            from cudnn_mha.integrations.importing import when_imported

            when_imported("transformers.modeling_utils", _register_with_transformers)
    except Exception as error:
        import sys
        import warnings

        message = (
            "TORCH_CUDNN_MHA_ENABLED is set, but cudnn_mha cannot be enabled and PyTorch's own "
            f"attention stays in place ({type(error).__name__}: {error})"
        )
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # warnings are errors here, and an error would break the import
            print(message, file=sys.stderr)


def _register_with_transformers() -> None:
    from cudnn_mha.integrations import transformers

    transformers.register()
