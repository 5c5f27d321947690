"""The Open Inference Protocol over gRPC, on a port of its own; off where GRPC_PORT is 0.

Each call becomes one of the HTTP routes (`serving.api.v2`), asked in this process: what is
admitted, loaded, refused, counted and logged is settled there; here is only the other wire.
"""
