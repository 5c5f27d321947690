"""The functions and classes that a script may define, and the defaults for those it does not."""
