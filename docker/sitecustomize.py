"""Installs import hooks when Python starts, so that `import mxnet` works in the image."""

from handlers.user_code import hooks

hooks.install()
