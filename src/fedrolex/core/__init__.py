"""What everything stands on: errors, random streams, finding things by name."""
