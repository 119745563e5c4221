"""From the fields of a request to token ids, images and sampling arguments."""
