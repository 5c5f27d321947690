"""Code shared by the commands push, upload, deploy, status, logs and teardown.

No module imports boto3 before a command runs, so that `--help` is quick.
"""
