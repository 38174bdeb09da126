"""What moto does well, and what it gets wrong put right: types, templates, networks, STS, SQS, EventBridge."""
