"""What scripts/push, upload, deploy, status, logs and teardown do, one module each.

Nothing here imports boto3 before the options are read, so `--help` works with any Python.
"""
