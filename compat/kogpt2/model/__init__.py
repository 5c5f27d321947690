"""The network of KoGPT2 v1, as a Gluon block."""
