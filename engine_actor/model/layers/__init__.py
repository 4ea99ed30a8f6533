"""The parts every family is built of."""
