"""What an op is, which backends it has, and what machine they run on. No kernel lives here."""
