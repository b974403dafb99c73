class Refused(Exception):
    """A call that ends with this status."""
