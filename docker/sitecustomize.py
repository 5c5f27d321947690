"""Python runs this at its start: it makes a plain `import mxnet` work in an image, too."""

from handlers.user_code import hooks

hooks.install()
