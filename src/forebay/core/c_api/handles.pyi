def shut_gate() -> None:
    """At the end of the interpreter: let no more callers in, and wait for those that are."""

class Refused(Exception):
    """A call that ends with this status."""
