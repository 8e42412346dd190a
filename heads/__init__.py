"""What a draft head is: the frozen backbone and what a head reads of it, one file a method, the own format."""
