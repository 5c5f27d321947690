"""Prepared models for the native library, and manifests of artifacts, on disk."""
