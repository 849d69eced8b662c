"""A run of ours as somebody else's: verl's command line, and the card of the model that it trained."""
