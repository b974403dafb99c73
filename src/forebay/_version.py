__version__ = "0.1.0"
"""The version of the package, as text."""
