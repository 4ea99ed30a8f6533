"""What an op is, which backends it has, and what machine they would run on. No kernel lives here."""
