"""Other trainers: scripts that read a spec, train, and print one line of JSON (bench/timer.py).

`comparison.BASELINES` lists them. They are in a source checkout only, not in what pip installs.
"""
