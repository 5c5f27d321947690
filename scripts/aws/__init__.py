"""What `kogpt2 push, upload, deploy, status, logs` and `teardown` do, one module each.

Nothing here imports boto3 before a command runs, so that `--help` is quick.
"""
