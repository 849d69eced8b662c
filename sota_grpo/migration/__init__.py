"""A run of ours as somebody else's: verl's command line, TRL's script, and the card of the model that it trained."""
