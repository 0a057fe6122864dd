//! OpenSSL's own programs, as the competitor of secured connections. They send data one way over TCP with TLS 1.3.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::pingpong::failure::Failure;

use super::pair::{self, Processors};
use super::secured::KeyFiles;

/// Sends `bytes` zeros from `openssl s_client` to `openssl s_server`. Returns Gbit/s. The time includes the handshake.
///
/// # Errors
/// One of the two processes failed.
pub fn measure(processors: &Processors, files: &KeyFiles, bytes: u64) -> Result<f64, Failure> {
    let failed = |what: &str, why: &dyn std::fmt::Display| Failure::new(format!("openssl: {what}: {why}"));
    let io = |what: &'static str| move |error: std::io::Error| failed(what, &error);
    let zeros = files.zeros(bytes).map_err(io("a file of zeros"))?;
    let port = pair::free_port()?;
    let path = |name: &str| -> PathBuf { files.path(name) };
    let mut server = Command::new("openssl");
    server.args(["s_server", "-quiet", "-tls1_3", "-accept", &port.to_string()]);
    server.arg("-cert").arg(path("server.pem")).arg("-key").arg(path("server.key"));
    let _server = pair::start(processors, server, port)?;
    let mut client = pair::limited("openssl");
    client.args(["s_client", "-quiet", "-no_ign_eof", "-tls1_3", "-verify_return_error"]);
    client.args(["-connect", &format!("127.0.0.1:{port}")]).arg("-CAfile").arg(path("ca.pem"));
    client.stdin(zeros).stdout(Stdio::null()).stderr(Stdio::piped());
    let started = Instant::now();
    let output = client.output().map_err(io("s_client"))?;
    let time = started.elapsed();
    if !output.status.success() {
        return Err(failed("s_client", &pair::failure(&output)));
    }
    Ok(bytes as f64 * 8.0 / 1e9 / time.as_secs_f64())
}
