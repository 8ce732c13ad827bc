"""The version, read by the build and by `smollm2 --version`."""

__version__ = "0.1.0"
