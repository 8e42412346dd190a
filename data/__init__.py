"""Files of chats to token ids and loss masks, conversations written by the backbone, and the shipped ones."""
