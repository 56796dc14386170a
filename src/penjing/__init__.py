"""penjing: a whole landscape in a small pot. Make a small language model from nothing, on hardware you own."""

__version__ = "0.2.0"
