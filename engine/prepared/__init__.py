"""Models prepared for the native library, and what artifacts were found to hold, on the disk."""
