"""What does EC2 answer? Its actions, in its own words."""
