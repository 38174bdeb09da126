"""What do requests and answers look like? The forms in which AWS's services are asked and answer, errors too."""
