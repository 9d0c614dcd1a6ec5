"""Environment builder and image cache for GPU Python runtimes."""

__version__ = "0.1.0"
