"""`kclrun cost`: what an application costs a month, by its settings and its traffic."""
