package format

// CloudEvents publishes messages as CloudEvents 1.0. The package's documentation lists the attributes.
type CloudEvents struct {
	// Source is the attribute source: a URI reference that names who sends, such as "/shop" or
	// "https://example.com/shop", of at most 1024 bytes. Required.
	Source string
	// Structured puts a whole event into the body, in JSON. Default: binary mode, in which the body is the
	// message's own.
	Structured bool
}

// Form implements Format.
func (CloudEvents) Form() string { return "cloudevents" }
