"""Environments and recipes as frozen dataclasses, read from TOML."""
