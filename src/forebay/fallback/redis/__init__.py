"""What stands in for the compiled modules of ``forebay.redis``."""
