variable "name" {
  description = "Name of the stack; left out, that of the application."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of everything in the stack."
  type        = map(string)
  default     = {}
}

variable "application" {
  description = "Names the lease table; overrides `application` of app.yaml."
  type        = string
}

variable "table_stream_arn" {
  description = "The ARN of a DynamoDB table's stream, to read its changes. The stack then makes no stream."
  type        = string
  default     = ""
}

variable "shard_count" {
  description = "Shards of the stream when it is made. kclrun follows every reshard later."
  type        = number
  default     = 6
}

variable "retention_hours" {
  description = "How long the stream keeps records. An alarm rings at half of it."
  type        = number
  default     = 24
}

variable "bundle" {
  description = "The archive to run, as bucket/key. docs/how-to/autoscaling-group.md says what is in it."
  type        = string
}

variable "vpc_id" {
  description = "The network of the machines."
  type        = string
}

variable "subnets" {
  description = "One subnet in each of three zones, with a way to AWS and to a Python package index."
  type        = list(string)
}

variable "image_id" {
  description = "Amazon Linux 2023, of each update's day; the machine type says whether x86_64 or arm64."
  type        = string
  default     = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
}

variable "instance_type" {
  description = "EC2 type of the machines."
  type        = string
  default     = "m7i.large"
}

variable "machines_min" {
  description = "One in each zone, so that the loss of a zone leaves two to go on."
  type        = number
  default     = 3
}

variable "machines_max" {
  description = "At most as many as the stream has shards; more would have nothing to do. At least one more than MachinesMin, for a deploy starts a new machine before it ends an old one."
  type        = number
  default     = 6
}

variable "leases_max" {
  description = "`leases.max`: what one machine takes. When a zone is lost, the others need places for all."
  type        = number
  default     = 64
}

variable "fetch_mode" {
  description = "polling, or fan-out: its own 2 MB/s of each shard, at once, billed by consumer, shard and hour."
  type        = string
  default     = "polling"
}

variable "scale_by" {
  description = "need: as many machines as kclrun says it needs; bytes: what a machine gets done; leases: how many shards it has, where all are alike."
  type        = string
  default     = "need"
}

variable "bytes_per_machine_minute" {
  description = "With ScaleBy bytes, what one machine should process in a minute. Measure yours: two thirds of what it does at full speed leaves room for the loss of a zone."
  type        = number
  default     = 200000000
}

variable "leases_per_machine" {
  description = "With ScaleBy leases, how many leases one machine should have."
  type        = number
  default     = 4
}

variable "namespace" {
  description = "CloudWatch namespace of kclrun's metrics."
  type        = string
  default     = "kclrun"
}

variable "alarm_topic_arn" {
  description = "SNS topic that alarms are sent to; empty, they only change colour."
  type        = string
  default     = ""
}
