"""The Open Inference Protocol over gRPC, on a port of its own; off where GRPC_PORT is 0.

Each call is passed to an HTTP route (`serving.api.v2`) in this process. Admission, loads, errors,
metrics and logs are there; here is only the conversion.
"""
