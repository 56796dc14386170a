"""Documents laid out as rows of equal length."""
