//! The competitor of secured connections: the programs of OpenSSL, one way over TCP with TLS 1.3.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::pingpong::failure::Failure;

use super::pair::{Guard, Processors};
use super::secured::Files;

/// Longest time in which a server begins to listen.
const PATIENCE: Duration = Duration::from_secs(10);

/// Whether the program can be run.
#[must_use]
pub fn is_there() -> bool {
    let version = Command::new("openssl").arg("version").stdin(Stdio::null()).stdout(Stdio::null()).status();
    version.is_ok_and(|status| status.success())
}

/// Sends zeros from `openssl s_client` to `openssl s_server`. Returns Gbit/s, the handshake included.
///
/// # Errors
/// One of the two did not do its work.
pub fn measure(processors: &Processors, files: &Files, bytes: u64) -> Result<f64, Failure> {
    let failed = |what: &str, why: &dyn std::fmt::Display| Failure::new(format!("openssl: {what}: {why}"));
    let io = |what: &'static str| move |error: std::io::Error| failed(what, &error);
    let zeros = files.zeros(bytes).map_err(io("a file of zeros"))?;
    // The program does not say which port it got, so that one is chosen that was free just now.
    let probe = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr());
    let address = probe.map_err(io("a free port"))?;
    let path = |name: &str| -> PathBuf { files.path(name) };
    processors.choose(0);
    let mut server = Command::new("openssl");
    server.args(["s_server", "-quiet", "-tls1_3", "-accept", &address.to_string()]);
    server.arg("-cert").arg(path("server.pem")).arg("-key").arg(path("server.key"));
    server.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let _server = Guard(server.spawn().map_err(io("s_server"))?);
    let started = Instant::now();
    while TcpStream::connect(address).is_err() {
        if started.elapsed() > PATIENCE {
            return Err(failed("s_server", &"does not listen"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    processors.choose(1);
    let mut client = Command::new("openssl");
    client.args(["s_client", "-quiet", "-no_ign_eof", "-tls1_3", "-verify_return_error"]);
    client.args(["-connect", &address.to_string()]).arg("-CAfile").arg(path("ca.pem"));
    client.stdin(zeros).stdout(Stdio::null()).stderr(Stdio::piped());
    let started = Instant::now();
    let output = client.output().map_err(io("s_client"))?;
    let time = started.elapsed();
    if !output.status.success() {
        return Err(failed("s_client", &String::from_utf8_lossy(&output.stderr)));
    }
    Ok(bytes as f64 * 8.0 / 1e9 / time.as_secs_f64())
}
