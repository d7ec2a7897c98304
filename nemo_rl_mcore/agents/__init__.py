"""The policy as an endpoint for agents: HTTP in front of the engines, with the tokens kept on this side by session."""
