"""The Open Inference Protocol over gRPC, on a port of its own; off if GRPC_PORT is 0.

Each call is passed to an HTTP route (`serving.api.v2`) in this process, which does the admission,
loads, errors, metrics and logs. This package only converts requests and answers.
"""
