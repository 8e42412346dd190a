"""Chats in, token ids and loss masks out; and chats made by the backbone itself where there are none.

- `sources`, `shapes`, `messages`, `chats`: files and data sets to lists of messages
- `turns`, `masks`, `prepare`, `store`: one chat to ids and masks; many of them to a folder
- `preview`, `page`, `statistics`, `language`, `overlap`: what they look like
- `groups`, `pool`: work in fixed groups that resumes whole; work on a stream in several processes
- `synthesize`, `regenerate`: the backbone writes conversations, or answers given prompts
"""
