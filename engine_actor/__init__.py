"""The engine: everything between a message coming in and a StepBatch going out.

Does not know HTTP. Importing this package imports nothing heavy: no torch, no ray, no cupy.
"""
