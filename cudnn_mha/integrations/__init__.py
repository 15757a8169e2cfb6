"""Adapters to other libraries, each imported only when it is used."""
