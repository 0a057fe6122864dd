//! The results of one side in a round.

use serde_json::Value;

use crate::pingpong::failure::Failure;

/// The results of one side in a round.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// The main result, in the unit of the table's row.
    pub figure: f64,
    /// The processor time for each message, in us: first the time of the client, then the time of the server. `None` if it was not
    /// measured.
    pub processor_us: Option<[f64; 2]>,
    /// The quantiles of the round trip in an open loop, in us; `None` for other measurements.
    pub tail: Option<Tail>,
}

/// The quantiles of a latency, in us: p50, p99, p99.9, and the largest value.
pub type Tail = [f64; 4];

impl From<f64> for Sample {
    fn from(figure: f64) -> Self {
        Self { figure, ..Self::default() }
    }
}

impl Sample {
    /// Parses the JSON output of `rdma-pingpong`. `figure` is the JSON pointer to the main result.
    ///
    /// # Errors
    /// The result is missing.
    pub fn of_pingpong(text: &str, figure: &str) -> Result<Self, Failure> {
        let value: Value = serde_json::from_str(text).map_err(Failure::new)?;
        let at = |place: &str| value.pointer(place).and_then(Value::as_f64);
        let found = at(figure).ok_or_else(|| Failure::new(format!("rdma-pingpong has no {figure} in {text}")))?;
        let processor = |side: &str| at(&format!("/processor_us_per_message/{side}"));
        let one_way = value.pointer("/mode").is_some_and(|mode| mode == "throughput");
        let processor_us = processor("client").zip(processor("server")).filter(|_| one_way);
        let tail = |name: &str| at(&format!("/open_loop_us/{name}"));
        let tail = tail("p50").zip(tail("p99")).zip(tail("p999").zip(tail("max")));
        Ok(Self {
            figure: found,
            processor_us: processor_us.map(|(client, server)| [client, server]),
            tail: tail.map(|((p50, p99), (p999, max))| [p50, p99, p999, max]),
        })
    }

    /// Parses the number that a client of this program printed.
    ///
    /// # Errors
    /// The text is not a number.
    pub fn printed(text: &str) -> Result<Self, Failure> {
        let figure: Result<f64, _> = text.trim().parse();
        figure.map(Self::from).map_err(|_| Failure::new(format!("a client printed {text:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_and_tails_are_read_where_they_are() {
        let text = r#"{"mode": "throughput", "x": 7, "processor_us_per_message": {"client": 0.2, "server": 0.25}}"#;
        let sample = Sample::of_pingpong(text, "/x").unwrap();
        assert_eq!(sample, Sample { figure: 7.0, processor_us: Some([0.2, 0.25]), tail: None });
        let text = r#"{"mode": "latency", "x": 7, "processor_us_per_message": {"client": 0.2, "server": null},
            "open_loop_us": {"p50": 1, "p99": 2, "p999": 3, "max": 4}}"#;
        let sample = Sample::of_pingpong(text, "/x").unwrap();
        assert_eq!(sample, Sample { figure: 7.0, processor_us: None, tail: Some([1.0, 2.0, 3.0, 4.0]) });
        assert!(Sample::of_pingpong(text, "/y").unwrap_err().to_string().contains("no /y"));
        assert!(Sample::of_pingpong("", "/x").is_err() && Sample::printed("none").is_err());
    }
}
