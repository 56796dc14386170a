"""The pages of `penjing plan`: time, memory, data and cost of a run, and how plans compare with results."""
