package outboxkafka

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// timeout bounds each call of Ready and Check.
const timeout = 5 * time.Second

// minInsync is the setting of a topic that says how many replicas must have a record before its confirm.
const minInsync = "min.insync.replicas"

// Ready returns nil if a broker answers within 5 s.
func (p *Publisher) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := p.client.Ping(ctx); err != nil {
		return fmt.Errorf("outboxkafka: ready: %w", err)
	}
	return nil
}

// Check checks the topics that Config.Topic and Config.Routes name: each exists, its user may see it, and a confirmed
// record is on two brokers. It returns nil if it finds nothing. Otherwise the error joins the findings, each with a
// method Fix() string, and the errors of checks that failed. It takes at most 5 s.
func (p *Publisher) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	found := check.Findings{Component: "outboxkafka"}
	existing, err := p.checkTopics(ctx, &found)
	if err == nil && len(existing) > 0 {
		err = p.checkInsync(ctx, existing, &found)
	}
	if err != nil {
		found.Join(fmt.Errorf("outboxkafka: check: %w", err))
	}
	return found.Err()
}

// checkTopics returns the topics that exist.
func (p *Publisher) checkTopics(ctx context.Context, found *check.Findings) (existing []string, err error) {
	request := kmsg.NewPtrMetadataRequest()
	for _, name := range p.topics() {
		topic := kmsg.NewMetadataRequestTopic()
		topic.Topic = kmsg.StringPtr(name)
		request.Topics = append(request.Topics, topic)
	}
	response, err := request.RequestWith(ctx, p.client)
	if err != nil {
		return nil, err
	}
	for _, topic := range response.Topics {
		name := *topic.Topic
		switch err := kerr.ErrorForCode(topic.ErrorCode); {
		case errors.Is(err, kerr.UnknownTopicOrPartition):
			found.Add("create it with 3 replicas", "topic %q does not exist", name)
		case errors.Is(err, kerr.TopicAuthorizationFailed):
			found.Add("allow it WRITE and DESCRIBE", "the user may not see topic %q", name)
		case err != nil:
			return nil, fmt.Errorf("topic %q: %w", name, err)
		default:
			existing = append(existing, name)
		}
	}
	return existing, nil
}

// checkInsync finds topics that confirm a record which one broker has. A user who may not read settings gets no finding.
func (p *Publisher) checkInsync(ctx context.Context, topics []string, found *check.Findings) error {
	request := kmsg.NewPtrDescribeConfigsRequest()
	for _, name := range topics {
		resource := kmsg.NewDescribeConfigsRequestResource()
		resource.ResourceType, resource.ResourceName, resource.ConfigNames = kmsg.ConfigResourceTypeTopic, name, []string{minInsync}
		request.Resources = append(request.Resources, resource)
	}
	response, err := request.RequestWith(ctx, p.client)
	if err != nil {
		return err
	}
	for _, resource := range response.Resources {
		err := kerr.ErrorForCode(resource.ErrorCode)
		if err != nil && !errors.Is(err, kerr.TopicAuthorizationFailed) {
			return fmt.Errorf("settings of topic %q: %w", resource.ResourceName, err)
		}
		for _, config := range resource.Configs {
			if config.Name != minInsync || config.Value == nil {
				continue
			}
			if n, err := strconv.Atoi(*config.Value); err == nil && n < 2 {
				found.Add("set "+minInsync+" to 2, with 3 replicas", "topic %q confirms a record that one broker has", resource.ResourceName)
			}
		}
	}
	return nil
}

// topics returns the topics that are known before the first message.
func (p *Publisher) topics() []string {
	all := []string{p.cfg.Topic}
	for name := range p.cfg.Routes {
		all = append(all, p.rules.Route(driver.Message{Name: name}).Exchange)
	}
	slices.Sort(all)
	return slices.Compact(all)
}
