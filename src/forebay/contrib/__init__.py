"""Extensions for frameworks and HTTP clients, one module each. A module's extra installs the packages it needs."""
