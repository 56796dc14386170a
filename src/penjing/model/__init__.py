"""Floor 2: the decoder, in single-device torch. No distributed code, no optimizer.

Shape legend for the whole package (a tensor carries its shape as a suffix, `q_BTHK`):
`B` rows, `T` positions, `S` key positions, `D` model width, `H` query heads, `G` key/value heads, `K` head width,
`F` feed-forward width, `V` vocabulary, `N` the positions that are scored, flattened over rows, `E` experts,
`R` LoRA rank, `P` pairs, `A` answers.
"""
