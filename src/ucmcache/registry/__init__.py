"""Who owns which lane: sessions that leave a lane, and come back to any."""
