"""forebay needs no setting here: it works with every worker class, preloaded or not, and without hooks."""

bind = "127.0.0.1:8000"
workers = 4
# preload_app = True

# gunicorn 25.1 and later: one path for all gunicorns of a user, and this shop is started several times at once.
control_socket_disable = True
