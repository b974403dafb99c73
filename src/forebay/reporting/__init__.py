"""Reports of commands: pages with plots that open without a network."""
