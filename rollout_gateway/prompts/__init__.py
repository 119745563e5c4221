"""Makes token ids, images and sampling arguments from the fields of a request."""
