"""Other trainers: scripts that read a spec, train, and print one line of JSON (bench/timer.py).

`comparison.BASELINES` lists them. Only a source checkout has them; pip does not install them.
"""
