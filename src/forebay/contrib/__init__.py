"""forebay in frameworks and clients, a module for each; what it needs is the extra of its name."""
