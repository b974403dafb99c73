"""Stand-ins for the compiled modules of ``forebay.redis``."""
